/* The FrameWriter: what Python has handed it, and what its parts share. */

#ifndef GPUWATCH_FRAME_WRITER_H
#define GPUWATCH_FRAME_WRITER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "layout.h"
#include "tensor_view.h"

/* The dictionaries and callables of the Python path, which this one shares. */
#define EACH_OBJECT(DO)                                                                                       \
    DO(memory) DO(cursor) DO(seen) DO(by_memory) DO(weights) DO(shapes) DO(ignored) DO(watched)    \
    DO(local) DO(kwargs) DO(gradients) DO(progress) DO(issued) DO(numbers) DO(tensor) DO(parameter) DO(modes) \
    DO(compiler) DO(hook_dict) DO(handle) DO(leaves_of) DO(next_segment)
/* None, or what has a tensor read that is not in host memory, or may not be read there:
   device_value(tensor, count) -> int | None, the index of its value in the page, which is there when it returns, or None if
   it cannot be measured; `count`: whether zeros and subnormals are to be counted.
   device_weight(parameter, numbers | None, count) -> (int | None, numbers | None): the same for a weight; `numbers` is what
   it has returned last for this parameter, version and step. */
#define EACH_OPTIONAL(DO) DO(device_value) DO(device_weight)

/* A shape, and its id in `shapes`. */
enum { RECENT_DIMS = 5, RECENT_SHAPES = 64 };
typedef struct {
    int64_t sizes[RECENT_DIMS];
    int is_used, ndim;
    uint32_t id;
} RecentShape;

#define AS_MEMBER(NAME) PyObject *NAME;
typedef struct {
    PyObject_HEAD
    EACH_OBJECT(AS_MEMBER)
    EACH_OPTIONAL(AS_MEMBER)
    int reads_host; /* whether memory of the host is read here, or as if it were a device's */
    Py_buffer cell; /* of the cursor */
    const Exchange *exchange;
    int forward, with_weights, with_grads;
    int64_t near[FLOATS_END], largest[FLOATS_END];
    PyGetSetDescrObject *version;              /* Tensor._version */
    RecentShape recent_shapes[RECENT_SHAPES]; /* by a hash of their sizes: a lookup in `shapes` needs a new tuple */
} FrameWriter;

/* Whether a tensor may be looked at: a mode would be shown it, and of what is being compiled nothing is known. */
int may_look(FrameWriter *self);

/* How many collectives have been issued; 0 if nobody can tell. */
int issued_now(FrameWriter *self, int64_t *seq);

/* Make the type, and add it to the module. -1 with an exception set. */
int add_frame_writer(PyObject *module);

#endif
