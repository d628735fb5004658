-- SPDX-License-Identifier: LGPL-3.0-or-later
-- Serves the dependency `dovetail:up`: the job waits until user-space Kubernetes is up.
--
-- Step: 3 (up). In: --dependency=dovetail:up, the answer of the service `dovetail` to `wait-up`.
-- Out: the dependency is removed, or the job fails with the service's reason. Invariant: no job
-- waits longer than the service may take, so one that never answers is no trap; one that is not
-- there is asked again for a while, since it may be starting or being replaced.
local scheme, wanted = "dovetail", "up"
local patience = 30 -- seconds for a service that is not there
local margin = 60 -- seconds more than the service's own limit
local usual = { dovetail = 120, usernetes = 600 } -- the service's own limit, by provider
local limit = usual.dovetail + margin

jobtap.on("conf.update", function(conf)
    local asked = conf.dovetail or {}
    local given = asked["up-timeout"] or usual[asked.provider or "dovetail"] or usual.dovetail
    if type(given) ~= "number" or given <= 0 then
        error("dovetail.up-timeout is a number of seconds", 0)
    end
    limit = given + margin
end)

-- What Flux answers for a service that is not there, or is taken away while it is asked. A plugin
-- is not told when one comes, so it asks again until then; a service that is there answers by itself.
local gone = { ENOSYS = true, EHOSTUNREACH = true, ECONNRESET = true }

local function ask(job, absent)
    job:rpc("dovetail.wait-up", { id = job.id }, limit, function(reply, why, code)
        if reply then
            job:dependency_remove(scheme .. ":" .. wanted)
        elseif gone[code] and absent < patience then
            job:after(1, function()
                ask(job, absent + 1)
            end)
        else
            job:raise("dovetail", 0, "Kubernetes is not up: " .. why)
        end
    end)
end

jobtap.on("job.dependency." .. scheme, function(job)
    if job.dependency.value ~= wanted then
        job:reject("dependency dovetail:" .. tostring(job.dependency.value) .. " is not known; dovetail:up is")
    end
    assert(job:dependency_add(scheme .. ":" .. wanted))
    ask(job, 0)
end)
