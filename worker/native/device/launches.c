/* Launches a kernel through the driver's cuLaunchKernel, of which Python gives the address: nothing is linked. */

#include "launches.h"

#include <string.h>

#include "objects.h"

enum { MOST_ARGUMENTS = 8, HIDDEN = 2, NOT_INITIALIZED = 3 };

/* LAUNCHED_KERNEL of worker/stats/kernel_launcher.py, which has asked the driver for the parameters. Behind those that are
   given a kernel may have HIDDEN pointers for memory that it does not use. */
typedef struct {
    void *function;
    unsigned threads, shared, given;
    unsigned char sizes[MOST_ARGUMENTS];
} LaunchedKernel;

static int (*launch_kernel)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                            unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra);

PyObject *use_driver(PyObject *module, PyObject *address)
{
    void *found = PyLong_AsVoidPtr(address);
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    memcpy(&launch_kernel, &found, sizeof found); /* ISO C has no cast between the two kinds of pointers */
    Py_RETURN_NONE;
}

PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    LaunchedKernel kernel;
    int64_t values[MOST_ARGUMENTS + HIDDEN] = {0}; /* a parameter of 4 bytes is the first half of its place */
    void *arguments[MOST_ARGUMENTS + HIDDEN];
    (void)module;
    if (given < 3 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != sizeof kernel)
        return wrong("expected launch(kernel, programs, stream, argument, ...)");
    memcpy(&kernel, PyBytes_AS_STRING(args[0]), sizeof kernel);
    if (kernel.given > MOST_ARGUMENTS || given - 3 != (Py_ssize_t)kernel.given)
        return wrong("expected as many arguments as the kernel has parameters");
    const unsigned long programs = PyLong_AsUnsignedLong(args[1]);
    void *stream = PyLong_AsVoidPtr(args[2]);
    for (unsigned i = 0; i < kernel.given && !PyErr_Occurred(); i++) {
        values[i] = PyLong_AsLongLong(args[3 + i]);
        if (kernel.sizes[i] == sizeof(int32_t) && values[i] != (int32_t)values[i])
            PyErr_SetString(PyExc_OverflowError, "expected an argument of 32 bits");
    }
    if (!PyErr_Occurred() && (programs < 1 || programs > INT32_MAX))
        PyErr_SetString(PyExc_ValueError, "expected at least one program");
    if (PyErr_Occurred())
        return NULL;
    for (int i = 0; i < MOST_ARGUMENTS + HIDDEN; i++)
        arguments[i] = &values[i];
    int error = NOT_INITIALIZED;
    if (launch_kernel != NULL) {
        PyThreadState *released = PyEval_SaveThread(); /* it waits where very many launches are outstanding */
        error = launch_kernel(kernel.function, (unsigned)programs, 1, 1, kernel.threads, 1, 1, kernel.shared, stream,
                              arguments, NULL);
        PyEval_RestoreThread(released);
    }
    return PyLong_FromLong(error);
}
