"""Data: sources → conversations → text with spans → tokens with weights → order → packed batches.

Must not know torch, transformers or ranks; the tokenizer is passed in.
"""

from lockstep.data.dataset import Compiled, DataReport, FileReport, compile_data, digest_data, split_rows
from lockstep.data.order import Batches, epoch_order, fill_batches
from lockstep.data.rendering import Tokenizer
from lockstep.data.source import DataError

__all__ = [
    "Batches",
    "Compiled",
    "DataError",
    "DataReport",
    "FileReport",
    "Tokenizer",
    "compile_data",
    "digest_data",
    "epoch_order",
    "fill_batches",
    "split_rows",
]
