// Package supervisor keeps services running.
//
// A [Service] is a name and a Run function, and nothing more. What surrounds
// it is given when it is added to a [Supervisor], as options that wrap it:
//
//   - [Restart]: whether it is started again, explicitly [Always], [OnFailure]
//     or [Once];
//   - [Backoff]: how long a failing service waits, exponential, capped and
//     jittered, and forgotten only after the service has stayed up for a while
//     (a counter reset at the start is a restart storm);
//   - [Health]: a check that ends a run which no longer works;
//   - [Needs]: services that must be ready first, and that stop later;
//   - [StopWithin]: how long a stop may take before the service is left behind.
//
// A panic in a service's Run is an error of that run, with its stack. Each
// start has a context of its own; a stop cancels the run, or the back-off that
// stands before the next one. At most one run of a service exists at a time: a
// run that ignores its context past its deadline is reported as [Stuck] and
// makes [Supervisor.Healthy] fail, so that whoever feeds the watchdog can act.
//
// The parts that a machine without another init needs are in the rooms below:
// pid1 (the process with pid 1 and its client), modules, netcfg, clock, and
// sdnotify for a daemon that lives under systemd instead.
//
// A mode puts them together like this:
//
//	init, err := pid1.Connect()             // in the "supervise" process
//	s := supervisor.New(supervisor.Options{Log: log})
//	s.Add(init.Service(s.Healthy))          // heartbeats to pid 1
//	s.Add(modules.NewService(modules.Options{AfterColdplug: pid1.MountLate}))
//	s.Add(clock.NewService(...))
//	s.Add(netcfg.NewService(...), supervisor.Needs("modules"))
//	s.Add(agent, supervisor.Needs("network", "clock"))
//	err = s.Run(ctx)
package supervisor
