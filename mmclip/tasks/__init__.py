"""Tasks: scored sentence pairs (sts), answers from retrieved documents (rag), which side to normalize (advise).

Each file is one task, from its data to its numbers and tables; commands of the same name run them. May import training,
reporting and everything below; not study, and not each other.
"""
