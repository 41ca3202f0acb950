/* Where a tensor's elements are, of what type and shape: torch's DLPack exchange table, without a copy or a sync. */

#ifndef GPUWATCH_TENSOR_VIEW_H
#define GPUWATCH_TENSOR_VIEW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Of dlpack.h, what does not change within its major version 1. */
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
    DLTensor dl; /* shape and strides are the tensor's own: not to be used after another thread may have run */
    uint8_t dtype; /* core/values.py */
    int is_host;
    int64_t count; /* of the elements that lie at `address` without a gap; 0 for another layout */
    int is_in_order; /* contiguous */
    void *address;
} TensorView;

/* The table in torch's capsule, if it is a version that is known here; else NULL with an exception set. */
const Exchange *exchange_of(PyObject *capsule);

/* The view of a strided tensor on any device; 0 if it has none, or no dtype that is known, with no exception set. */
int view_of(const Exchange *exchange, PyObject *tensor, TensorView *view);

/* Whether it is what is read here, in one piece of host memory: floats, and integers. */
int is_plain(const TensorView *view);
int is_plain_integer(const TensorView *view);

/* Whether all of it lies in memory that the storage has: 1, 0, or -1 if torch does not tell. A storage may be freed or made
   smaller under its tensors, as FSDP does with untyped_storage().resize_(0): a view with an offset then has an address
   that is not NULL. */
int is_in_storage(PyObject *tensor, const TensorView *view);

/* The shape as a tuple. NULL with no exception set. */
PyObject *dims_of(const TensorView *view);

#endif
