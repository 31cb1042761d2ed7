"""Data: sources → conversations → text with spans → tokens with weights → columns on disk → order → packed batches.

Must not know torch, transformers or ranks; the tokenizer is passed in.
"""

from lockstep.data.dataset import Compiled, Progress, compile_data, mix_rows, split_rows
from lockstep.data.order import Batches, epoch_order, fill_batches
from lockstep.data.report import DataReport, FileReport
from lockstep.data.sources.files import DataError
from lockstep.data.store.columns import Rows
from lockstep.data.text.rendering import Tokenizer

__all__ = [
    "Batches",
    "Compiled",
    "DataError",
    "DataReport",
    "FileReport",
    "Progress",
    "Rows",
    "Tokenizer",
    "compile_data",
    "epoch_order",
    "fill_batches",
    "mix_rows",
    "split_rows",
]
