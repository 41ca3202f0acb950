/* Where a tensor's elements are, of what type and shape: torch's DLPack exchange table, without a copy or a sync. */

#ifndef GPUWATCH_TENSOR_VIEW_H
#define GPUWATCH_TENSOR_VIEW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* The part of dlpack.h that does not change within its major version 1. */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} DLTensor;

typedef struct {
    struct { struct { uint32_t major, minor; } version; void *previous; } header;
    void *allocate, *from_tensor, *to_tensor;
    int (*view)(void *tensor, DLTensor *out);
    void *stream;
} Exchange;

typedef struct {
    DLTensor dl; /* do not use shape and strides after another thread may have run: they are the tensor's own */
    uint8_t dtype; /* core/values.py */
    int is_host;
    int64_t count; /* elements at `address` without a gap; 0 for another layout */
    int is_in_order; /* contiguous */
    void *address;
} TensorView;

/* The table in torch's capsule, which is torch's own and is never freed. NULL with an exception set if its version is unknown. */
const Exchange *exchange_of(PyObject *capsule);

/* The view of a strided tensor on any device; 0, with no exception set, if it has none or its dtype is unknown. The tensor must be
   exactly a Tensor or a Parameter, and the caller holds it. Nothing is copied, and the device is not waited for. */
int view_of(const Exchange *exchange, PyObject *tensor, TensorView *view);

/* Whether this code can read it: floats, or integers, in one piece of host memory. */
int is_plain(const TensorView *view);
int is_plain_integer(const TensorView *view);

/* Whether its elements lie at an address without a gap, in order, and have a dtype that C reads on a device. */
int is_simple(const TensorView *view);

/* The number of elements that a device's reader can read from the address on, in order; 0 if it is to find that out itself:
   for a rare dtype, another layout, memory that is gone, or numbers that are to be negated. */
int64_t elements_in_order(PyObject *tensor, const TensorView *view);

/* Of its elements. */
int64_t bytes_of(const TensorView *view);

/* Whether the whole tensor lies in the memory of its storage: 1, 0, or -1 if torch does not tell. A storage may be freed or
   shrunk under its tensors, as FSDP does with untyped_storage().resize_(0). The address of a view with an offset is then not
   NULL. */
int is_in_storage(PyObject *tensor, const TensorView *view);

/* The shape as a tuple. NULL with no exception set. */
PyObject *dims_of(const TensorView *view);

#endif
