"""The public names, for type checkers; ``__init__.py`` resolves them when they are used."""

from opgraft import compat as compat, host as host, ops as ops, testing as testing, torch_ops as torch_ops
from opgraft.api import apply_policy as apply_policy
from opgraft.api import backends as backends
from opgraft.api import explain as explain
from opgraft.api import explain_for as explain_for
from opgraft.api import export_policy as export_policy
from opgraft.api import get_policy as get_policy
from opgraft.api import get_trace as get_trace
from opgraft.api import op as op
from opgraft.api import refresh as refresh
from opgraft.api import register_backend as register_backend
from opgraft.api import registry as registry
from opgraft.api import set_policy as set_policy
from opgraft.api import trace as trace
from opgraft.api import use as use
from opgraft.api import warmup as warmup
from opgraft.errors import ArgumentTypeError as ArgumentTypeError
from opgraft.errors import ArgumentValueError as ArgumentValueError
from opgraft.errors import BufferOverflowError as BufferOverflowError
from opgraft.errors import NoKernelError as NoKernelError
from opgraft.errors import NotSupported as NotSupported
from opgraft.errors import OpgraftError as OpgraftError
from opgraft.errors import PluginError as PluginError
from opgraft.errors import PolicyError as PolicyError
from opgraft.errors import RegistrationError as RegistrationError
from opgraft.errors import UnknownOpError as UnknownOpError
from opgraft.errors import UnknownSelectorError as UnknownSelectorError
from opgraft.fused_op import BaseFusedOp as BaseFusedOp
from opgraft.fused_op import publish as publish
from opgraft.fused_op import register_fused_op as register_fused_op
from opgraft.fused_op import register_oot_forward as register_oot_forward
from opgraft.fused_op import torch_compile_mode as torch_compile_mode
from opgraft.hardware import ANY as ANY
from opgraft.hardware import CapabilityRequirement as CapabilityRequirement
from opgraft.hardware import DeviceFacts as DeviceFacts
from opgraft.hookspecs import forward as forward
from opgraft.hookspecs import hookimpl as hookimpl
from opgraft.planning import Plan as Plan
from opgraft.planning import check_agreement as check_agreement
from opgraft.planning import plan as plan
from opgraft.selection import Candidate as Candidate
from opgraft.selection import Selection as Selection
from opgraft.spec import Available as Available
from opgraft.spec import Backend as Backend
from opgraft.spec import BackendRecord as BackendRecord
from opgraft.spec import FormatSignature as FormatSignature
from opgraft.spec import KernelBackend as KernelBackend
from opgraft.spec import KernelSpec as KernelSpec
from opgraft.spec import Tolerance as Tolerance
from opgraft.spec import Unavailable as Unavailable

__version__: str
__all__: list[str]
