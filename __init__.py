"""purestep: DeepSeek-V4 decode as pure functions over immutable values.

```python
import purestep as ps

model = ps.load_model("tiny")
state = ps.init_state(model, ps.Capacity(requests=2, tokens=4096, context=1024))
state, a = ps.open_request(state, ps.SamplingParams(max_new_tokens=64))
state, out = ps.extend_step(model, state, {a: prompt_ids})
state, out = ps.decode_step(model, state)
```

A step takes the whole state and returns the whole next state; the state given stays what it was.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from .model.forward import forward as forward
from .model.forward import layer_step as layer_step
from .model.loading import load_model as load_model
from .model.model import Model as Model
from .model.sequence import forward_sequence as forward_sequence
from .state import invariants as invariants
from .state.batch import ForwardBatch as ForwardBatch
from .state.batch import MHCState as MHCState
from .state.batch import ScheduleBatch as ScheduleBatch
from .state.batch import StepOutput as StepOutput
from .state.capacity import Capacity as Capacity
from .state.captured import Captured as Captured
from .state.captured import FedToken as FedToken
from .state.config import Config as Config
from .state.decode import DecodeState as DecodeState
from .state.decode import Request as Request
from .state.decode import find_request as find_request
from .state.errors import CapacityError as CapacityError
from .state.errors import CheckpointError as CheckpointError
from .state.errors import ConfigError as ConfigError
from .state.errors import DtypeError as DtypeError
from .state.errors import PurestepError as PurestepError
from .state.errors import RankError as RankError
from .state.errors import RequestError as RequestError
from .state.errors import ShapeError as ShapeError
from .state.errors import StateBusyError as StateBusyError
from .state.exported import ExportedRequest as ExportedRequest
from .state.kv import KVState as KVState
from .state.numerics import Numerics as Numerics
from .state.parallel import Parallel as Parallel
from .state.sampling import SamplingParams as SamplingParams
from .state.sampling import SamplingState as SamplingState
from .step.commit import commit as commit
from .step.compare import Difference as Difference
from .step.compare import first_difference as first_difference
from .step.compiled import CompiledStep as CompiledStep
from .step.compiled import compile_step as compile_step
from .step.decode import decode_step as decode_step
from .step.extend import extend_step as extend_step
from .step.files import restore_state as restore_state
from .step.files import save_state as save_state
from .step.forks import fork_request as fork_request
from .step.forward_batch import forward_batch as forward_batch
from .step.generate import generate as generate
from .step.prepare import prepare_decode as prepare_decode
from .step.prepare import prepare_extend as prepare_extend
from .step.relay import relay as relay
from .step.requests import close_request as close_request
from .step.requests import init_state as init_state
from .step.requests import open_request as open_request
from .step.requests import retract_request as retract_request
from .step.requests import rewind_request as rewind_request
from .step.run_files import load_run as load_run
from .step.run_files import save_run as save_run
from .step.sample import sample as sample
from .step.trace import trace_step as trace_step
from .step.trace_values import Trace as Trace
from .step.transfer import export_request as export_request
from .step.transfer import import_request as import_request
from .step.transfer import load_request as load_request
from .step.transfer import save_request as save_request

__all__ = [
    "Capacity",
    "CapacityError",
    "Captured",
    "CheckpointError",
    "CompiledStep",
    "Config",
    "ConfigError",
    "DecodeState",
    "Difference",
    "DtypeError",
    "ExportedRequest",
    "FedToken",
    "ForwardBatch",
    "KVState",
    "MHCState",
    "Model",
    "Numerics",
    "Parallel",
    "PurestepError",
    "RankError",
    "Request",
    "RequestError",
    "SamplingParams",
    "SamplingState",
    "ScheduleBatch",
    "ShapeError",
    "StateBusyError",
    "StepOutput",
    "Trace",
    "close_request",
    "commit",
    "compile_step",
    "decode_step",
    "export_request",
    "extend_step",
    "find_request",
    "first_difference",
    "fork_request",
    "forward",
    "forward_batch",
    "forward_sequence",
    "generate",
    "import_request",
    "init_state",
    "invariants",
    "layer_step",
    "load_model",
    "load_request",
    "load_run",
    "open_request",
    "prepare_decode",
    "prepare_extend",
    "relay",
    "restore_state",
    "retract_request",
    "rewind_request",
    "sample",
    "save_request",
    "save_run",
    "save_state",
    "strategies",
    "trace_step",
]


def __getattr__(name: str) -> ModuleType:
    # Strategies need hypothesis, which only the test extra installs.
    if name == "strategies":
        return import_module(".step.strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
