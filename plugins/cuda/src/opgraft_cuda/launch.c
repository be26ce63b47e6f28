/* launch(function, device, blocks, threads, stream, *arguments): start a kernel whose parameters are
 * all 64 bits wide. The CUDA driver is taken from the process, so that neither its headers nor its
 * library is needed to build this. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

enum { INVALID_CONTEXT = 201, LEADING = 5, MOST_ARGUMENTS = 8 };

static int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            void *, void **, void **);
static int (*retain_primary_context)(void **, int);
static int (*set_current_context)(void *);
static int (*error_text)(int, const char **);

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  unsigned long long leading[LEADING], values[MOST_ARGUMENTS];
  void *parameters[MOST_ARGUMENTS], *context;
  if (count < LEADING || count > LEADING + MOST_ARGUMENTS) {
    return PyErr_Format(PyExc_TypeError, "launch takes %d to %d arguments, got %zd", LEADING,
                        LEADING + MOST_ARGUMENTS, count);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(args[i]);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    if (i < LEADING) {
      leading[i] = value;
    } else {
      values[i - LEADING] = value;
      parameters[i - LEADING] = &values[i - LEADING];
    }
  }
  void *const function = (void *)leading[0], *const stream = (void *)leading[4];
  const unsigned blocks = (unsigned)leading[2], threads = (unsigned)leading[3];
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
  /* A thread that has not called CUDA before has no context yet. */
  if (status == INVALID_CONTEXT && !retain_primary_context(&context, (int)leading[1]) &&
      !set_current_context(context)) {
    status = launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
  }
  Py_END_ALLOW_THREADS;
  if (status) {
    const char *text = NULL;
    error_text(status, &text);
    return PyErr_Format(PyExc_RuntimeError, "CUDA error %d at launch: %s", status, text ? text : "unknown");
  }
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL,
     "launch(function, device, blocks, threads, stream, *arguments)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "opgraft_cuda_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_opgraft_cuda_launch(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver) {
    *(void **)&launch_kernel = dlsym(driver, "cuLaunchKernel");
    *(void **)&retain_primary_context = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&set_current_context = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&error_text = dlsym(driver, "cuGetErrorString");
  }
  if (!launch_kernel || !retain_primary_context || !set_current_context || !error_text) {
    PyErr_SetString(PyExc_ImportError, "the CUDA driver (libcuda.so.1) cannot be used");
    return NULL;
  }
  return PyModule_Create(&definition);
}
