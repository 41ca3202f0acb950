/* Starts to read the tensors of a frame that lie on a device. */

#ifndef GPUWATCH_DEVICE_READS_H
#define GPUWATCH_DEVICE_READS_H

#include "waiting.h"

/* Start to read ordinary tensors and weights, all on one device. Their values lie side by side. `count`: see `device_frame`.
   Returns the index of the first, and in `rows` a list of the numbers of each weight that was not read before; -1 if
   `device_frame` must be asked, and nothing was done; -2 if it has failed. */
int64_t start_reads(FrameWriter *self, const Asked *asked, const Frame *frame, int count, PyObject **rows);

#endif
