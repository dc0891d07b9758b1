"""mmclip: CLIP and text retrieval training in which embedding length may carry relevance."""

__version__ = "0.1.0"
