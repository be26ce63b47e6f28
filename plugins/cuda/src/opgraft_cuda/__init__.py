"""opgraft's backend for NVIDIA GPUs: which kernels run there. See ``opgraft_cuda.plugin``."""
