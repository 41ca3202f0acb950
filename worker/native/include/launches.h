/* Launches kernels of gpuwatch's on a device: worker/device/kernel_launcher.py. */

#ifndef GPUWATCH_LAUNCHES_H
#define GPUWATCH_LAUNCHES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* use_driver(address), for Python. */
PyObject *use_driver(PyObject *module, PyObject *address);

/* launch(kernel, programs, stream, argument, ...), for Python. */
PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* launch_reads(kernels, stream of, tensors, elements, at, inner, stride, rows, position, count), for Python. */
PyObject *launch_reads(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* Launch the kernels that read these tensors of a list, on a `stream`, into rows side by side from `position` on. `kernels`: as
   for launch_reads. `elements`: of each, from its address on. Returns how many are being read, -1 with an exception set. */
int launch_tensors(PyObject *kernels, PyObject *stream, PyObject *tensors, void *const *addresses, const int64_t *elements,
                   PyObject *rows, int64_t position, PyObject *count);

#endif
