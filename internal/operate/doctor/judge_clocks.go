package doctor

import (
	"fmt"
	"time"
)

// Differences of clocks.
const (
	clockOff = 2 * time.Second  // differences from here on are a warning
	clockBad = 30 * time.Second // the length of a usual lease; differences from here on are an error
)

// judgeClocks compares the clocks of the nodes and NATS servers with this host's clock. lookAtClocks measures them.
func judgeClocks(f *Facts) (list []Finding) {
	for _, c := range f.Clocks {
		off, way := c.Ahead, "ahead of"
		if off < 0 {
			off, way = -off, "behind"
		}
		if off < clockOff {
			continue
		}
		severity := Warning
		if off >= clockBad {
			severity = Error
		}
		list = append(list, finding(severity, clockOffset, c.Of, "clocks differ",
			fmt.Sprintf("the clock is at least %v %s this host's", off.Round(time.Millisecond), way),
			"run chrony or systemd-timesyncd (timedatectl set-ntp true) on both hosts; ages, leases and times of "+
				"snapshots are shown wrong until then"))
	}
	return list
}
