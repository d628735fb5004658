-- SPDX-License-Identifier: LGPL-3.0-or-later
-- Holds the epilog of a slice's job until nothing of its part of Kubernetes is left.
--
-- Step: 8 (teardown). In: jobs with attributes.user.dovetail.slice, the answer of the service
-- `dovetail` to `wait-down`. Out: the job's resources are free for others only afterwards.
-- Invariant: the epilog ends after a limit at the latest, and then says so on the job; where
-- there is no such service nothing is held, since then nobody could confirm.
local epilog = "dovetail-release"
local limit = 30 -- seconds
local grace = 60 -- seconds more for processes that are still to be ended

jobtap.on("conf.update", function(conf)
    local given = conf.dovetail and conf.dovetail["down-timeout"] or 30
    if type(given) ~= "number" or given <= 0 then
        error("dovetail.down-timeout is a number of seconds", 0)
    end
    limit = given
end)

local function finish(job, held, why)
    if held.over then return end
    held.over = true
    if why then job:raise("dovetail", 4, "teardown is not confirmed: " .. why) end
    job:epilog_finish(epilog, why and 1 or 0)
end

-- A service that was there once, `known`, is being replaced when it is not. A plugin is not told
-- when the new one comes, so it asks again until then; a service that is there answers by itself.
local function ask(job, slice, held)
    held.why = nil
    job:rpc("dovetail.wait-down", { id = job.id, slice = slice }, held.limit, function(reply, why, code)
        local gone = code == "ENOSYS" or code == "EHOSTUNREACH" or code == "ECONNRESET"
        if reply or (code == "ENOSYS" and not held.known) then
            finish(job, held)
        elseif gone then
            held.known, held.why = true, why
            job:after(1, function()
                if not held.over then ask(job, slice, held) end
            end)
        else
            finish(job, held, why)
        end
    end)
end

jobtap.on("job.state.cleanup", function(job)
    local user = job.jobspec.attributes.user
    local slice = user and user.dovetail and user.dovetail.slice
    -- Without resources, the job never ran.
    if slice and job.R and job:epilog_start(epilog) then
        local running = job.end_event.name ~= "finish" -- after an exception, until it is killed
        local held = { limit = limit + (running and grace or 0) }
        job:after(held.limit, function() -- however often the service is replaced
            finish(job, held, held.why or "dovetail.wait-down: no answer in time")
        end)
        ask(job, slice, held)
    end
end)
