"""Checkpoints: one reader per format, all giving the same thing (base.py). `open_checkpoint` finds the reader."""

from trtforge.builder.checkpoint.base import Checkpoint, Coverage, TensorInfo, TokenizerFiles, cover
from trtforge.builder.checkpoint.detect import open_checkpoint

__all__ = ["Checkpoint", "Coverage", "TensorInfo", "TokenizerFiles", "cover", "open_checkpoint"]
