package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const namespaceVersion = 1

// How many partitions a new namespace has if nothing else is said, and how many one can have.
const (
	DefaultPartitions = 8
	MaxPartitions     = 1024
)

// namespaceRecord is what the meta bucket keeps under "namespace": JSON, for people too.
type namespaceRecord struct {
	Version    int       `json:"version"`
	Partitions uint32    `json:"partitions"`
	Created    time.Time `json:"created"`
}

// Model is what the workers of one model agree on.
type Model struct {
	Name      string `json:"model"`
	BlockSize uint32 `json:"block_size"` // tokens
}

// NamespaceConfig is for the indexer that may be the first in a namespace.
type NamespaceConfig struct {
	Name string // see [CheckNamespace]

	// Partitions is how many the log shall have, for ever. Zero takes what is there, or 8 in a new namespace.
	Partitions uint32

	// Replicas of the namespace's record: 1, 3 or 5, and the default for streams and buckets. Zero leaves what is
	// there, or 1 in a new namespace.
	Replicas int

	// Restore writes the namespace's record again if it is missing or unreadable. The number of partitions is the
	// number of the log's streams. Without Restore such a namespace is a [RecordError].
	Restore bool
}

// Namespace is one deployment's world on a connection. Its methods may be called from any goroutine.
type Namespace struct {
	c          *Conn
	name       string
	partitions uint32
	replicas   int
	meta       *Bucket
}

// JoinNamespace creates the namespace if nobody has, by compare-and-set: of several indexers that start at once one
// creates and all see the same. It is for indexers.
//
// A namespace is new only if its log has no streams. If streams exist and the record is missing or unreadable, the
// error is a [RecordError]: a new record could have another number of partitions than the log.
//
// The server must take messages that have room for the largest value of a bucket, as it does by default; else the error
// wraps [ErrTooLarge] and names both sizes and the setting. If the namespace has another number of partitions than the
// configuration asks for, the error wraps [ErrMismatch] and names both.
func JoinNamespace(ctx context.Context, c *Conn, cfg NamespaceConfig) (*Namespace, error) {
	if err := CheckNamespace(cfg.Name); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	ns, err := joinNamespace(ctx, c, cfg)
	if err != nil {
		return nil, fmt.Errorf("join namespace %s: %w", cfg.Name, err)
	}
	return ns, nil
}

func joinNamespace(ctx context.Context, c *Conn, cfg NamespaceConfig) (*Namespace, error) {
	if cfg.Partitions > MaxPartitions {
		return nil, fmt.Errorf("%d partitions: at most %d", cfg.Partitions, MaxPartitions)
	}
	if err := c.roomForValues(); err != nil {
		return nil, err
	}
	meta, err := ensureBucket(ctx, c, metaBucket(cfg.Name),
		BucketConfig{Replicas: cfg.Replicas, once: true, largest: largestRecord}, 1)
	if err == nil {
		err = meta.eraseMarkers(ctx)
	}
	if err != nil {
		return nil, err
	}
	ns, err := readNamespace(ctx, meta, cfg.Name)
	if recordLost(err) {
		if err := createRecord(ctx, meta, cfg); err != nil {
			return nil, err
		}
		ns, err = readNamespace(ctx, meta, cfg.Name)
		for tries := 0; errors.Is(err, ErrNotFound) && tries < 20 && loop.Wait(ctx, 100*time.Millisecond); tries++ {
			// it is there; a server that has not heard of the bucket has answered
			ns, err = readNamespace(ctx, meta, cfg.Name)
		}
	}
	if err != nil {
		return nil, err
	}
	if cfg.Partitions != 0 && cfg.Partitions != ns.partitions {
		return nil, fmt.Errorf("%w: it was created with %d partitions and %d are asked for; the number cannot change",
			ErrMismatch, ns.partitions, cfg.Partitions)
	}
	there, err := c.streamInfo(ctx, meta.stream)
	if err != nil {
		return nil, err
	}
	ns.replicas = there.Config.Replicas
	return ns, nil
}

// OpenNamespace reads a namespace that an indexer has created. It is for shims and clients: it creates nothing.
// If there is none, the error wraps [ErrNoNamespace]. If its record is unreadable, the error wraps [ErrBadRecord].
func OpenNamespace(ctx context.Context, c *Conn, name string) (*Namespace, error) {
	if err := CheckNamespace(name); err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	ns, err := readNamespace(ctx, openBucket(c, metaBucket(name)), name)
	if errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("%w: start an indexer first (%w)", ErrNoNamespace, err)
	} else if errors.Is(err, ErrBadRecord) {
		err = fmt.Errorf("%w; start an indexer with --restore-namespace, which writes it again", err)
	}
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	return ns, nil
}

func readNamespace(ctx context.Context, meta *Bucket, name string) (*Namespace, error) {
	entry, err := meta.Latest(ctx, namespaceKey)
	if err != nil {
		return nil, err
	}
	rec, err := parseRecord(entry.Value)
	if err != nil {
		return nil, fmt.Errorf("record %q in bucket %s: %w", namespaceKey, meta.name, err)
	}
	return &Namespace{c: meta.c, name: name, partitions: rec.Partitions, replicas: 1, meta: meta}, nil
}

// Name is the namespace's name.
func (n *Namespace) Name() string { return n.name }

// Partitions is how many partitions the log has.
func (n *Namespace) Partitions() uint32 { return n.partitions }

// Conn is the connection on which the namespace was opened.
func (n *Namespace) Conn() *Conn { return n.c }

// PartitionOf is the partition of an instance in this namespace.
func (n *Namespace) PartitionOf(instance events.WorkerID) (events.Partition, error) {
	return PartitionOf(instance, n.partitions)
}

// WorkerKey is the key of one (worker, rank) in the bucket of workers.
func (n *Namespace) WorkerKey(key events.RankKey) (string, error) {
	p, err := n.PartitionOf(key.Instance)
	if err != nil {
		return "", err
	}
	return WorkerKey(p, key)
}

// RegisterModel says that a worker serves a model with a block size. The first one decides, until
// [Namespace.ForgetModel]; who differs gets an error that wraps [ErrMismatch] and names both sizes.
func (n *Namespace) RegisterModel(ctx context.Context, m Model) error {
	if err := n.registerModel(ctx, m); err != nil {
		return fmt.Errorf("register model %.64q: %w", m.Name, err)
	}
	return nil
}

func (n *Namespace) registerModel(ctx context.Context, m Model) error {
	if m.Name == "" || m.BlockSize == 0 || m.BlockSize > events.MaxBlockSize {
		return fmt.Errorf("with block size %d: both must be given, and a block has 1 to %d tokens", m.BlockSize,
			events.MaxBlockSize)
	}
	key, err := modelKey(m.Name)
	if err != nil {
		return err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err = n.meta.create(ctx, key, text); !errors.Is(err, ErrConflict) {
		return err
	}
	there, revision, err := n.readModel(ctx, key)
	if errors.Is(err, errBadModel) { // nobody can use it: it is written again
		err = n.meta.replace(ctx, key, text, revision)
		if !errors.Is(err, ErrConflict) {
			return err
		}
		there, _, err = n.readModel(ctx, key)
	}
	if err == nil && there.BlockSize != m.BlockSize {
		err = fmt.Errorf("%w: registered with block size %d, this worker has %d", ErrMismatch, there.BlockSize,
			m.BlockSize)
	}
	return err
}

// Model is what was registered for a model; [ErrNotFound] if nothing was.
func (n *Namespace) Model(ctx context.Context, name string) (Model, error) {
	key, err := modelKey(name)
	if err != nil {
		return Model{}, err
	}
	m, _, err := n.readModel(ctx, key)
	return m, err
}

// ForgetModel removes what was registered for a model, so that the next worker decides anew; [ErrNotFound] if nothing
// was. A record that cannot be read is removed too. Whether a worker still serves the model is for the caller to know.
// Two workers that register it meanwhile, one before and one after, may differ.
func (n *Namespace) ForgetModel(ctx context.Context, name string) (Model, error) {
	key, err := modelKey(name)
	if err != nil {
		return Model{}, err
	}
	m, revision, err := n.readModel(ctx, key)
	if err == nil || errors.Is(err, errBadModel) {
		err = n.meta.Erase(ctx, key, revision)
	}
	if err == nil {
		err = n.announceForgotten(ctx, name)
	}
	if err != nil {
		return Model{}, fmt.Errorf("forget model %q: %w", name, err)
	}
	return m, nil
}

// announceForgotten writes a record that watchers of models see: they do not see that one was erased.
func (n *Namespace) announceForgotten(ctx context.Context, model string) error {
	key, err := forgottenKey(model)
	if err != nil {
		return err
	}
	entry, _, err := n.meta.last(ctx, key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	text, err := json.Marshal(time.Now().UTC().Truncate(time.Second))
	if err != nil {
		return err
	}
	return n.meta.replace(ctx, key, text, entry.Revision)
}

// readModel reads the record of a model. With an error that wraps errBadModel it returns the record's revision too.
func (n *Namespace) readModel(ctx context.Context, key string) (m Model, revision uint64, err error) {
	entry, err := n.meta.Latest(ctx, key)
	if err != nil {
		return Model{}, 0, err
	}
	if m, err = parseModel(key, entry.Value); err != nil {
		err = fmt.Errorf("record %q in bucket %s: %w", key, n.meta.name, err)
	}
	return m, entry.Revision, err
}

// errBadModel: the record of a model cannot be read. A shim of the model writes it again when it starts.
var errBadModel = errors.New("the model's record cannot be read")

// parseModel reads the record of a model under its key. The error wraps errBadModel.
func parseModel(key string, text []byte) (m Model, err error) {
	name, ok := parseModelKey(key)
	switch err := strictjson.Unmarshal(text, &m); {
	case err != nil:
		return Model{}, fmt.Errorf("%w: %w", errBadModel, err)
	case !ok || m.Name != name:
		return Model{}, fmt.Errorf("%w: it names the model %.64q", errBadModel, m.Name)
	case m.BlockSize == 0 || m.BlockSize > events.MaxBlockSize:
		return Model{}, fmt.Errorf("%w: its block size is %d", errBadModel, m.BlockSize)
	}
	return m, nil
}
