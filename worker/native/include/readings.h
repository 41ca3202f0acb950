/* The tensors that a launch on a device reads: worker/device/grouped_readings.py. */

#ifndef GPUWATCH_READINGS_H
#define GPUWATCH_READINGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* readings(exchange, types, waiting, at, tensors, earlier, device type, device id), for Python. */
PyObject *readings(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* tables(entries, share_of, most, rows), for Python: worker/device/kernel_variants.py. */
PyObject *tables(PyObject *module, PyObject *const *args, Py_ssize_t given);

#endif
