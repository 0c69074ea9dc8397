"""What stays of a run beside its numbers: what it told, on disk and in the tools that show runs.

records    a report as a dictionary of plain values
gradients  the gradient overview, at some steps
metrics    adapter.metrics.jsonl: a line for every report, whole also after a kill and a resumption
loggers    TensorBoard, Weights & Biases and MLflow
recorder   hears the reports of a run, and passes them on to all of these
"""

from pyggml.lora.record.gradients import Watch, gradients_record, overview_of
from pyggml.lora.record.loggers import LOGGERS, check_loggers
from pyggml.lora.record.metrics import MetricsFile, append, are_records, read_records
from pyggml.lora.record.recorder import Recorder, metrics_beside

__all__ = [
    "LOGGERS", "MetricsFile", "Recorder", "Watch", "append", "are_records", "check_loggers",
    "gradients_record", "metrics_beside", "overview_of", "read_records",
]  # fmt: skip
