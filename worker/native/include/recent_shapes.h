/* The number of a tensor's shape in the recorder. */

#ifndef GPUWATCH_RECENT_SHAPES_H
#define GPUWATCH_RECENT_SHAPES_H

#include "tensor_view.h"
#include "writer_state.h"

/* The id of a tensor's shape; 0 if the Python path has not given it one yet. */
int shape_of(FrameWriter *self, const TensorView *view, uint32_t *shape);

#endif
