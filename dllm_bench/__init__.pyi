from dllm_bench.api.generation import decoder as decoder
from dllm_bench.api.generation import decoders as decoders
from dllm_bench.api.generation import generate as generate
from dllm_bench.api.generation import stream as stream
from dllm_bench.api.models import load_model as load_model
from dllm_bench.api.models import wrap as wrap
from dllm_bench.api.pictures import figure as figure
from dllm_bench.api.pictures import trade_off as trade_off
from dllm_bench.api.pictures import verdicts as verdicts
from dllm_bench.api.runs import acceptance as acceptance
from dllm_bench.api.runs import compare as compare
from dllm_bench.api.runs import evaluate as evaluate
from dllm_bench.api.runs import records as records
from dllm_bench.api.runs import run as run
from dllm_bench.api.runs import table as table

__version__: str
DECODING_VERSION: int
