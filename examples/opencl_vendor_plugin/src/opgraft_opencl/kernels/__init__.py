"""The OpenCL kernels: one module an op, imported when the op first runs through OpenCL."""
