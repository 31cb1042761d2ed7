"""Data: sources → conversations → text with spans → tokens with weights → columns on disk → order → packed batches."""

from lockstep.data.columns import Rows
from lockstep.data.dataset import CompiledData, CompileProgress, compile_data, mix_rows, split_rows
from lockstep.data.order import Batches, epoch_order, fill_batches
from lockstep.data.report import DataReport, FileReport
from lockstep.data.sources.rows import DataError
from lockstep.types import Tokenizer

__all__ = [
    "Batches",
    "CompileProgress",
    "CompiledData",
    "DataError",
    "DataReport",
    "FileReport",
    "Rows",
    "Tokenizer",
    "compile_data",
    "epoch_order",
    "fill_batches",
    "mix_rows",
    "split_rows",
]
