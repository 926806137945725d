package routing

import (
	"errors"
	"time"
)

// AffinityMode is what becomes of a session's request that is not to go where the session is.
type AffinityMode string

// The modes.
const (
	SoftAffinity AffinityMode = "soft" // the session follows it
	HardAffinity AffinityMode = "hard" // it is refused
)

// SessionAffinity is how requests of one session are kept on one worker. Names and ranges are Dynamo's.
type SessionAffinity struct {
	// TTLSecs is how long a session stays bound after its last use. From 1 to 31,536,000.
	TTLSecs float64 `json:"ttl_secs" msgpack:"ttl_secs"`

	Mode AffinityMode `json:"mode,omitempty" msgpack:"mode,omitempty"` // default soft
}

// TTL is how long a session stays bound after its last use.
func (a *SessionAffinity) TTL() time.Duration { return time.Duration(a.TTLSecs * float64(time.Second)) }

// validate complains of what is wrong with a, which may be nil.
func (a *SessionAffinity) validate() error {
	if a == nil {
		return nil
	}
	var x complaints
	if !(a.TTLSecs >= 1 && a.TTLSecs <= 31_536_000) {
		x.add("session_affinity.ttl_secs is %v: it must be from 1 to 31536000", a.TTLSecs)
	}
	if a.Mode != "" && a.Mode != SoftAffinity && a.Mode != HardAffinity {
		x.add("session_affinity.mode is %q: it must be %q or %q", a.Mode, SoftAffinity, HardAffinity)
	}
	return errors.Join(x...)
}
