"""From entry points to backend records: found, judged, loaded, asked, or put in quarantine.

The only module that knows entry points. :func:`scan` reads metadata alone; :func:`discover` judges
it and loads what may be loaded. Both depend on their arguments only. Nothing a plugin does, short
of ending the process, reaches another plugin or the caller.
"""

from __future__ import annotations

import contextlib
import email
import importlib
import inspect
import keyword
import operator
import os
import re
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import importlib_metadata
import pluggy

from opgraft.errors import PluginError, nearest
from opgraft.hardware import CapabilityRequirement, Detector
from opgraft.hookspecs import (
    PROJECT,
    HookSpecs,
    forward_hook,
    hookimpl,
    hookspec,
    offer_of,
)
from opgraft.spec import (
    RESERVED_SELECTORS,
    Available,
    Backend,
    BackendRecord,
    KernelBackend,
    KernelSpec,
    Unavailable,
    check_op_id,
)

if TYPE_CHECKING:
    from opgraft.policy import Policy

GROUP: Final = "opgraft.backends"
SLOW_SECONDS: Final = 2.0
"""Loading imports nothing heavy, so that even a cold network disk is quicker than this."""
