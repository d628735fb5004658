/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Iterations of OpenFOAM solvers.
 */
#ifndef DOVETAIL_OPENFOAM_H
#define DOVETAIL_OPENFOAM_H

#include <stdbool.h>

/* Is this a program of OpenFOAM? */
bool openfoam_loaded(void);
/* The program ends in good order: the iteration that it is in, if it is OpenFOAM's, is complete. */
void openfoam_ends(void);

#endif
