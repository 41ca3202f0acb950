/* The numbers of a frame's tensors on a device: read from here, or by the reader in Python for what this cannot read. */

#ifndef GPUWATCH_DEVICE_ROWS_H
#define GPUWATCH_DEVICE_ROWS_H

#include "rows.h"

/* Give every tensor on a device a value of the page, and have it read. 0 if Python must write the frame. */
int read_device_rows(FrameWriter *self, Frame *frame, int64_t step);

#endif
