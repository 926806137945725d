//go:build judges

package torture

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
)

var (
	tortureRounds = flag.Int("torture.rounds", 0, "rounds of TestTorture, TestTortureCluster and TestTortureLoad; 0 runs a few")
	tortureSeed   = flag.Uint64("torture.seed", 1, "seed of the schedules; 0 selects a random seed")
	tortureRace   = flag.Bool("torture.race", false, "run the programs with the race detector")
)

// roundsOr returns the configured number of rounds, or few.
func roundsOr(few int) int {
	if *tortureRounds > 0 {
		return *tortureRounds
	}
	return few
}

// scheduleSeed returns the configured seed, or a new seed.
func scheduleSeed() uint64 {
	if *tortureSeed > 0 {
		return *tortureSeed
	}
	return uint64(time.Now().UnixNano())
}

// racingPrograms builds ours with the race detector.
func racingPrograms(t *testing.T) func(string) string {
	dir := t.TempDir()
	for _, pkg := range []string{harness.Module + "cmd/indexer", harness.Module + "cmd/worker-shim"} {
		if out, err := exec.Command("go", "build", "-race", "-o", dir+"/", pkg).CombinedOutput(); err != nil {
			t.Fatalf("go build -race %s: %v\n%s", pkg, err, out)
		}
	}
	return func(name string) string { return filepath.Join(dir, name) }
}

// mayhem causes faults of machines and networks, and records them.
type mayhem struct {
	rng        *rand.Rand
	stage      *stage
	counts     map[string]int
	transcript []string // of a round
	begun      time.Time
	later      []undoing
	held       map[*daemon]bool
	scanned    map[*daemon]int64 // offset of the scanned output

	hurts func(what string, killed bool) // called before a kill, pause or disturbance
}

func newMayhem(rng *rand.Rand) mayhem {
	return mayhem{rng: rng, counts: map[string]int{}, held: map[*daemon]bool{}, scanned: map[*daemon]int64{},
		hurts: func(string, bool) {}}
}

// undoing is the end of a lasting fault.
type undoing struct {
	due  time.Time
	undo func()
}

// undoLater ends a fault after a moment, or when the round settles.
func (m *mayhem) undoLater(undo func()) {
	d := time.Duration(m.rng.IntN(100)) * time.Millisecond
	if m.rng.IntN(3) == 0 {
		d *= 15
	}
	m.later = append(m.later, undoing{time.Now().Add(d), undo})
}

// undo ends the due faults, or all faults.
func (m *mayhem) undo(all bool) {
	m.later = slices.DeleteFunc(m.later, func(u undoing) bool {
		due := all || time.Now().After(u.due)
		if due {
			u.undo()
		}
		return due
	})
}

func (m *mayhem) note(format string, args ...any) {
	m.transcript = append(m.transcript, fmt.Sprintf("%6.3fs ", time.Since(m.begun).Seconds())+fmt.Sprintf(format,
		args...))
}

func (m *mayhem) count(what string) { m.counts[what]++ }

// startAll starts the stopped processes.
func (m *mayhem) startAll() {
	for _, d := range m.stage.daemons() {
		if !d.alive() {
			m.note("%s starts", d.name)
			d.start()
		}
	}
}

// kill kills a process or stops the process gracefully, and restarts it at once or later.
func (m *mayhem) kill(d *daemon) {
	if !d.alive() {
		return
	}
	kind := strings.Fields(d.name)[0]
	if m.rng.IntN(6) == 0 && !slices.Contains(m.stage.servers, d) {
		m.note("%s is stopped in good order", d.name)
		m.count("stops of " + kind)
		d.stop()
	} else {
		m.note("%s is killed", d.name)
		m.count("kill -9 of " + kind)
		m.hurts(d.name, true)
		d.kill()
	}
	if m.rng.IntN(2) == 0 {
		m.note("%s starts", d.name)
		d.start()
	}
}

// hold stops a process for a moment, as a busy machine would.
func (m *mayhem) hold(d *daemon) {
	if !d.alive() {
		return
	}
	m.note("%s is held", d.name)
	m.count("SIGSTOP of " + strings.Fields(d.name)[0])
	life := d.running
	m.hurts(d.name, false)
	d.signal(syscall.SIGSTOP)
	m.held[d] = true
	m.undoLater(func() {
		delete(m.held, d)
		if d.running == life {
			m.note("%s goes on", d.name)
			d.signal(syscall.SIGCONT)
		}
	})
}

func (m *mayhem) spoilConnection() {
	i := m.rng.IntN(len(m.stage.proxies))
	p, name := m.stage.proxies[i], m.stage.names[i]
	m.hurts("connections", false)
	switch m.rng.IntN(4) {
	case 0, 1:
		m.note("connections %s are cut", name)
		m.count("connections cut")
		p.cut()
	case 2:
		m.note("connections %s stall", name)
		m.count("connections stalled")
		p.set(true, false)
	case 3:
		m.note("connections %s are cut and refused", name)
		m.count("connections refused")
		p.set(false, true)
		p.cut()
	}
	m.undoLater(func() {
		m.note("connections %s are good", name)
		p.set(false, false)
	})
}

// heardOf maps log texts of the programs to counted names.
var heardOf = map[string]string{
	"msg=restored":         "snapshots restored",
	"snapshot written":     "snapshots written",
	"snapshot not written": "snapshots that failed",
	"snapshot skipped":     "snapshots skipped",
	"log trimmed":          "purges",
	"could not be replayed; the rank's holdings are cleared": "gaps, cleared",
	"a new incarnation of the engine begins":                 "incarnations",
	"the engine is gone":                                     "engines taken for gone",
	"restoring again":                                        "logs that turned out to be others",
	"resync needed":                                          "resyncs needed",
	"the log does not accept events":                         "publishing that failed",
}

// listen reads the new output of the programs.
func (m *mayhem) listen(t testing.TB) {
	for _, d := range m.stage.daemons() {
		said := d.words(m.scanned[d])
		m.scanned[d] += int64(len(said))
		if bad := badWords.FindString(said); bad != "" {
			t.Fatalf("%s said %q", d.name, bad)
		}
		if slices.Contains(m.stage.servers, d) {
			continue
		}
		for words, name := range heardOf {
			m.counts[name] += strings.Count(said, words)
		}
	}
}
