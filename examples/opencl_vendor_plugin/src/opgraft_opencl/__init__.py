"""An OpenCL backend for opgraft. Importing this package loads neither torch nor OpenCL."""
