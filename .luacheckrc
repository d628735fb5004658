-- SPDX-License-Identifier: LGPL-3.0-or-later
-- What luacheck(1) is to know of the jobtap plugins: the names that the sandbox leaves.
std = {
    read_globals = {
        "assert", "error", "ipairs", "jobtap", "math", "next", "pairs", "select", "string", "table",
        "tonumber", "tostring", "type",
    },
}
max_line_length = 120
