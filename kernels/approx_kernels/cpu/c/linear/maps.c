/* Learned feature maps of linear attention alone. */

#include "linear/maps.h"
