/* Learned feature maps of linear attention by themselves. */

#include "linear/maps.h"
