/* Loops over a tensor's bits, each in one pass. A float's bits with the sign cleared sort as integers: core/values.py. */

#ifndef GPUWATCH_REDUCTIONS_H
#define GPUWATCH_REDUCTIONS_H

#include <stddef.h>
#include <stdint.h>

/* Choose the widest registers of this processor. Once, before any of the others. */
void choose_width(void);

/* Smallest and largest of `count` integers of 2, 4 or 8 bytes, with the sign bit cleared. For no integers at all, these are
   the largest number of the type and 0. */
void reduce_extremes(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high);

/* Smallest and largest absolute value of integers of 1, 2, 4 or 8 bytes. Only those of 1 byte may be unsigned. 0 if one of
   them is the smallest number of its type, which has no absolute value. */
int reduce_integers(const void *memory, size_t count, long bytes, int is_signed, int64_t *low, int64_t *high);

/* Add to `zeros` how many are 0, and to `small` how many are below `limit` (0 included), with the sign bit cleared. */
void reduce_below(const void *memory, size_t count, long bytes, int64_t limit, int64_t *zeros, int64_t *small);

#endif
