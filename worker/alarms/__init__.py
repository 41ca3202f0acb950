"""From a frame to an alarm: the frames that are judged, the call of the judge, and what is told beside an alarm."""
