package cluster

import (
	"slices"
	"time"
)

// Report is the result of a measurement. The ratios come first, with their bounds.
type Report struct {
	QueryP50 float64 `json:"query_p50_ratio"` // three nodes beside a bare request-reply; at most 2.5
	QueryP99 float64 `json:"query_p99_ratio"` // the same; at most 4
	// a request to any of three relays, which send a request to another relay before the reply, beside a bare
	// request-reply: the time of a query over three nodes without work
	RelayP50 float64 `json:"relay_p50_ratio"`
	// blocks applied per second of processor time, three nodes beside a single node; at least 0.8
	Ingest float64 `json:"ingest_ratio"`
	// seconds from the kill of a node to the last incomplete answer; at most 1
	WholeAgain float64 `json:"whole_again_s"`
	// holdings restored per second after the kill, beside a restore of a single node
	Rereplication float64 `json:"rereplication_ratio"`

	Workers  int    `json:"workers"`
	Holdings uint64 `json:"holdings"` // of one replica
	Asked    int    `json:"request_bytes"`
	Answered int    `json:"reply_bytes"`

	Forms []Form `json:"one_node_forms"` // each at most 1.3 times a bare request

	Query Times `json:"query"`
	Bare  Times `json:"bare"`
	Relay Times `json:"relay"`
	One   Taken `json:"one_node"`
	Three Taken `json:"three_nodes"`

	FailQueries  int      `json:"failover_queries"`
	NotWhole     int      `json:"failover_not_whole"`
	FailLongest  float64  `json:"failover_longest_s"` // query that was answered whole
	Believed     float64  `json:"believed_dead_s"`    // after the kill, until the others began to restore
	Redundant    float64  `json:"redundant_again_s"`  // after the kill, until every partition was ready on two nodes
	Restore      Restored `json:"restore"`            // of one node
	Rereplicated Restored `json:"rereplicated"`       // by the two that are left
}

// Times are of requests, in microseconds.
type Times struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
}

// Taken is the work of nodes that applied events.
type Taken struct {
	Blocks     uint64  `json:"blocks"` // applied, on all replicas
	Seconds    float64 `json:"s"`
	CPU        float64 `json:"cpu_s"`            // of the nodes
	PerCPU     float64 `json:"blocks_per_cpu_s"` // what one core that does nothing else would apply
	PerSeconds float64 `json:"blocks_per_s"`
}

// Restored is the work of nodes that restored snapshots.
type Restored struct {
	Holdings uint64  `json:"holdings"`
	Seconds  float64 `json:"s"`
	Rate     float64 `json:"holdings_per_s"`
}

func timesOf(took []time.Duration) Times {
	slices.Sort(took)
	at := func(q float64) float64 {
		return float64(took[min(len(took)-1, int(q*float64(len(took))))].Nanoseconds()) / 1e3
	}
	return Times{len(took), at(0.5), at(0.99), at(1)}
}
