"""prefgrpo: RL post-training of flow models from pairwise preferences."""

__version__ = "0.1.0"
