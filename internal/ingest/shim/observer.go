package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// Observer receives the events of [Run], from its goroutines. Its methods must not block. [Unobserved] is an observer
// without effect.
type Observer interface {
	Connected(endpoint string)
	Disconnected(endpoint string, err error)
	Failed(endpoint string, err error) // a connection attempt failed
	Stray(frames int)                  // a message on the engine's socket that no engine sends

	// Several names the engines that publish where one is expected, and the followed engine; empty: only one publishes.
	Several(engines string)

	Undecodable(seq events.EngineSeq, err error)
	ReplayFailed(from events.EngineSeq, err error)
	ReplayEnded()             // the replay socket has answered
	SnapshotFailed(err error) // a request to Config.Source for all blocks of the engine failed
	LogFailed(err error)
	LogUnreadable(err error) // the rank's last message in the log is unreadable; a new incarnation begins
	Published(cursor events.Cursor, last events.StreamSeq)
	Stepped(c Counts, queued int) // after each step; queued is in bytes
	StateChanged(State)           // called first when the loop of Run begins

	// Unserved reports why the engine accepts no requests any more; empty: the engine accepts requests again.
	Unserved(why string)
}

// Unobserved ignores all events. Types embed it to implement a part of [Observer].
type Unobserved struct{}

func (Unobserved) Connected(string)                          {}
func (Unobserved) Disconnected(string, error)                {}
func (Unobserved) Failed(string, error)                      {}
func (Unobserved) Stray(int)                                 {}
func (Unobserved) Several(string)                            {}
func (Unobserved) Undecodable(events.EngineSeq, error)       {}
func (Unobserved) ReplayFailed(events.EngineSeq, error)      {}
func (Unobserved) ReplayEnded()                              {}
func (Unobserved) SnapshotFailed(error)                      {}
func (Unobserved) LogFailed(error)                           {}
func (Unobserved) LogUnreadable(error)                       {}
func (Unobserved) Published(events.Cursor, events.StreamSeq) {}
func (Unobserved) Stepped(Counts, int)                       {}
func (Unobserved) StateChanged(State)                        {}
func (Unobserved) Unserved(string)                           {}
