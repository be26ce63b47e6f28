"""A pretend accelerator: NOT something a vendor copies.

A real vendor has hardware, a driver, and a torch extension that makes the device known. Acme has
none of these, so this package plays all three in plain Python: `memory` is the card's memory,
`processor` runs programs on it, `torch_device` makes ``torch.device("acme")`` work and
`torch_module` is ``torch.acme``. Nothing in here concerns opgraft.
"""

from __future__ import annotations

import logging


def autoload() -> None:
    """Make the device known to torch; the ``torch.backends`` entry point, called by torch.

    An exception here would make ``import torch`` impossible for everybody. So what stands in the
    way (another extension has taken torch's one place for out-of-tree devices, or this torch has
    another Python support for them) is logged, and ``torch.device("acme")`` stays unknown.
    """
    try:
        from opgraft_acme.pretend_device import torch_device

        torch_device.register()
    except (RuntimeError, ImportError, AttributeError) as reason:
        logging.getLogger(__name__).warning("opgraft-acme: there is no acme device: %s", reason)
