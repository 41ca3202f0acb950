/* Loops over a tensor's bits, each in one pass. A float's bits with the sign cleared sort as integers: core/values.py. */

#ifndef GPUWATCH_REDUCTIONS_H
#define GPUWATCH_REDUCTIONS_H

#include <stddef.h>
#include <stdint.h>

/* Choose the widest registers of this processor. Once, before any of the others. */
void choose_width(void);

/* Smallest and largest of `count` integers of 2, 4 or 8 bytes, the sign bit cleared; of none the largest number and 0. */
void reduce_extremes(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high);

/* Smallest and largest absolute value of integers of 1, 2, 4 or 8 bytes, unsigned ones of 1 byte only. 0 if one of them is
   the smallest that there is, which has no absolute value. */
int reduce_integers(const void *memory, size_t count, long bytes, int is_signed, int64_t *low, int64_t *high);

/* How many are zero, and how many below `limit` (zeros included), the sign bit cleared. Added to what is there. */
void reduce_below(const void *memory, size_t count, long bytes, int64_t limit, int64_t *zeros, int64_t *small);

#endif
