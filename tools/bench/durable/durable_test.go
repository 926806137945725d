package durable

import (
	"context"
	"io"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/tools/corpus"
)

// TestRun measures a small corpus with evictions. Run checks that the index has the blocks at the end of the corpus.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	job := corpus.Job{Options: corpus.Defaults(), Seed: 1, Out: filepath.Join(t.TempDir(), "corpus")}
	job.Workers, job.Requests, job.Capacity = 3, 40, 3000
	h, err := corpus.Run(ctx, job, io.Discard)
	if err != nil || h.Removed == 0 {
		t.Fatalf("%+v, %v", h, err)
	}
	for _, accounts := range []bool{false, true} {
		o := Options{File: job.Out, Partitions: 2, Sync: time.Minute, Accounts: accounts}
		r, err := Run(ctx, o, func(string) {})
		if err != nil {
			t.Fatalf("accounts %v: %v", accounts, err)
		}
		if r.Blocks != h.Stored+h.Removed || r.Holdings != h.LiveAtEnd || r.LogBytes < 16*h.Stored ||
			r.SnapshotBytes == 0 || r.RestoreSeconds == 0 ||
			r.UnchangedBytes >= r.SnapshotBytes || r.OneWorkerBytes == 0 || r.Idle.Query.N == 0 ||
			r.Idle.Publish.N == 0 || r.Snapshot.Apply.N == 0 {
			t.Errorf("accounts %v: %+v", accounts, *r)
		}
	}
}
