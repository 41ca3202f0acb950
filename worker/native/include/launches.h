/* Launches kernels of gpuwatch's on a device: worker/stats/kernel_launcher.py. */

#ifndef GPUWATCH_LAUNCHES_H
#define GPUWATCH_LAUNCHES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* use_driver(address), for Python. */
PyObject *use_driver(PyObject *module, PyObject *address);

/* launch(kernel, programs, stream, argument, ...), for Python. */
PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* launch_reads(kernels, stream of, tensors, elements, at, inner, stride, rows, position, count), for Python. */
PyObject *launch_reads(PyObject *module, PyObject *const *args, Py_ssize_t given);

#endif
