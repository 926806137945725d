// Package launch runs an indexer node as a process. It checks the settings, reads their files, starts a NATS server in
// the process or connects to NATS, and runs the node of package server.
//
//	p := &launch.Process{...} // the flags of indexer serve
//	err := p.Check(&wrong)
//	err = p.Run(ctx, log)
package launch
