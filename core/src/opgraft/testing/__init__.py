"""The conformance suite, and a loopback backend to try it on. Needs ``opgraft[testing]``.

Nothing of the core imports this package but its command line.
"""

from __future__ import annotations
