from dllm_bench.api.generation import decoder as decoder
from dllm_bench.api.generation import decoders as decoders
from dllm_bench.api.generation import generate as generate
from dllm_bench.api.generation import load_model as load_model
from dllm_bench.api.generation import stream as stream
from dllm_bench.api.generation import wrap as wrap
from dllm_bench.api.runs import acceptance as acceptance
from dllm_bench.api.runs import compare as compare
from dllm_bench.api.runs import evaluate as evaluate
from dllm_bench.api.runs import figure as figure
from dllm_bench.api.runs import records as records
from dllm_bench.api.runs import run as run
from dllm_bench.api.runs import table as table
from dllm_bench.api.runs import trade_off as trade_off
from dllm_bench.api.runs import verdicts as verdicts

__version__: str
DECODING_VERSION: int
