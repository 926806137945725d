package node

import (
	"fmt"
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// problems collects the problems of partitions. A cause common to several partitions is one problem. The zero value is
// empty.
type problems struct{ list []*problem }

// problem is a cause with the affected partitions.
type problem struct {
	what, do string
	in       cluster.Set
	detail   string // of the first partition
}

// add adds a problem of partition p. what and do identify the cause, and must be equal for all partitions. detail may
// be empty.
func (l *problems) add(p events.Partition, what, detail, do string) {
	for _, known := range l.list {
		if known.what == what && known.do == do {
			known.in.Add(p)
			return
		}
	}
	l.list = append(l.list, &problem{what, do, cluster.SetOf(p), detail})
}

// lines returns a line per cause: "partitions 0-7: WHAT: DETAIL (of partition 0); what to do: DO".
func (l *problems) lines() (lines []string) {
	for _, p := range l.list {
		line := fmt.Sprintf("%s: %s", p.in.Phrase(), p.what)
		if p.detail != "" {
			line += ": " + p.detail
			if p.in.Len() > 1 {
				line += fmt.Sprintf(" (of partition %d)", p.in.List()[0])
			}
		}
		if p.do != "" {
			line += "; what to do: " + p.do
		}
		lines = append(lines, line)
	}
	return lines
}

// Remedies for problems of partitions.
const (
	seeNATS = "check that the NATS servers run and have a JetStream quorum, and that this node reaches the servers " +
		"(indexer doctor); the node goes on by itself"
	seeBehind = "wait while LAG in indexer status falls; if LAG grows, give the node more CPU or start a further node"
	seeResync = "wait: the shims repeat the missing events; start the shims of the ranks if a shim is gone"
	seeWait   = "wait: the node repairs the partition without help"
	seeRoom   = "make room on the disk of the NATS servers, or raise the limit of the storage (--store-bytes of a server " +
		"in an indexer, max_file of an account) or of the bucket (--snapshot-bytes)"
	seeServer = "read the messages of the NATS server in the log of this node; restart the node if the problem stays"
	seeNodes  = "start the missing nodes (indexer cluster), or find out why the running nodes are not ready"
)

// Problems of partitions.
const (
	LogUnreadable  = "the log has not been readable for a while; queries go to nodes with a readable log first"
	NobodyServes   = "served by no node"
	logFailed      = "the log or the snapshots could not be read"
	logUnheard     = "no state of the log arrives"
	snapshotFailed = "the snapshot was not written and will be tried again"
	snapshotLeft   = "the snapshot could not be written here, and is left to node "
)

// StorageProblems are parts of the problems that end when NATS responds and has room.
var StorageProblems = []string{LogUnreadable, logFailed, logUnheard, snapshotFailed, snapshotLeft, " % full (",
	" takes nothing", " take nothing", " shims wait, "}

// fullness collects the usage of the places where NATS stores data. The zero value is empty.
type fullness struct {
	filling []string
	refused []refusals
}

// refusals is an error of the operating system or of the server, with the places that reject writes for this reason.
type refusals struct {
	why    string
	first  error
	places []string
	logs   cluster.Set
}

// add adds the usage of a place, and the error of a place that rejects writes.
func (f *fullness) add(what string, u usage) {
	if u.filling() {
		f.filling = append(f.filling, fmt.Sprintf("%s is %d %% full (%d of %d bytes); what to do: %s", what,
			100*u.used/u.limit, u.used, u.limit, seeRoom))
	}
	if u.refused != nil {
		r := f.refusalsFor(u.refused)
		r.places = append(r.places, what)
	}
}

// addLog is add for the log of partition p.
func (f *fullness) addLog(p events.Partition, u usage) {
	refused := u.refused
	u.refused = nil
	f.add(fmt.Sprintf("the log of partition %d", p), u)
	if refused != nil {
		f.refusalsFor(refused).logs.Add(p)
	}
}

// refusalsFor returns the refusals with the reason of err. The words before the reason name the stream and the file.
func (f *fullness) refusalsFor(err error) *refusals {
	why := err.Error()
	why = why[strings.LastIndex(why, ": ")+1:]
	for i := range f.refused {
		if f.refused[i].why == why {
			return &f.refused[i]
		}
	}
	f.refused = append(f.refused, refusals{why: why, first: err})
	return &f.refused[len(f.refused)-1]
}

// lines returns a line for every nearly full place and every reason of rejected writes. restart is the further remedy
// after room has been made.
func (f *fullness) lines(restart string) []string {
	list := f.filling
	for _, r := range f.refused {
		places := r.places
		switch r.logs.Len() {
		case 0:
		case 1:
			places = append(places, "the log of "+r.logs.Phrase())
		default:
			places = append(places, "the logs of "+r.logs.Phrase())
		}
		verb := "takes"
		if len(r.places)+r.logs.Len() > 1 {
			verb = "take"
		}
		list = append(list, fmt.Sprintf("%s %s nothing: %v; what to do: %s%s", strings.Join(places, " and "), verb, r.first,
			seeRoom, restart))
	}
	return list
}
