package main

import (
	"time"

	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// leaseAge and leaseLeft say how long ago a lease was renewed, and in what time it expires if it is not again.
func leaseAge(l *api.Lease, now time.Time) string {
	if l == nil {
		return "-"
	}
	return max(now.Sub(l.Renewed), 0).Round(time.Second).String()
}

func leaseLeft(l *api.Lease, now time.Time) string {
	switch {
	case l == nil:
		return "never"
	case l.State == string(registry.Expired):
		return "expired"
	}
	return max(l.Expires.Sub(now), 0).Round(time.Second).String()
}

// engineStands says how it stands with a rank's engine, and since when.
func engineStands(w *api.WorkerInfo, now time.Time) string {
	said := string(w.Engine)
	switch {
	case w.Engine == "":
		said = "-"
	case w.Engine != api.EngineConnected && w.EngineSince != nil:
		said += " " + max(now.Sub(*w.EngineSince), 0).Round(time.Second).String()
	}
	if w.CatchingUp {
		said += ", catching up"
	}
	return said
}
