/* The numbers of a tensor in host memory, each read in one pass. A float's bits with the sign cleared sort as integers. */

#ifndef GPUWATCH_REDUCTIONS_H
#define GPUWATCH_REDUCTIONS_H

#include "tensor_view.h"

/* What a row holds of a tensor: core/values.py */
typedef struct {
    int64_t low, high, meta;
} Numbers;

/* Choose the widest registers of this processor. Once, before any of the others. */
void choose_width(void);

/* Read `count` floats of a dtype of EACH_FLOAT. The flags of non-finite numbers are left out of `meta`. The caller keeps the
   memory alive and holds the GIL: see `read_parts`. */
void read_floats(const void *memory, size_t count, uint8_t dtype, Numbers *numbers);

/* Read a tensor that `is_plain` or `is_plain_integer`, as above. 0 if its numbers are left to Python: one of them is not
   finite, or is the smallest number of its type, which has no absolute value. */
int read_plain(const TensorView *view, Numbers *numbers);

/* `high` of a tensor that `is_plain`. This thread reads it alone, and does not release the lock. */
int64_t largest_of(const TensorView *view);

/* Add to `zeros` how many are 0, and to `small` how many are below `limit` (0 included), with the sign bit cleared. */
void reduce_below(const void *memory, size_t count, long bytes, int64_t limit, int64_t *zeros, int64_t *small);

#endif
