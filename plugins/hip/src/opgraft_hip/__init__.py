"""opgraft's backend for AMD GPUs: which kernels run there. See ``opgraft_hip.plugin``."""
