"""python -m mmclip"""

from mmclip.cli import main

if __name__ == "__main__":
    main()
