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

// DefaultPartitions is the number of partitions of a new namespace. MaxPartitions is the largest number.
const (
	DefaultPartitions = 8
	MaxPartitions     = 1024
)

// namespaceRecord is the value of "namespace" in the meta bucket, as readable JSON.
type namespaceRecord struct {
	Version    int       `json:"version"`
	Partitions uint32    `json:"partitions"`
	Created    time.Time `json:"created"`
}

// Model is the common setting of a model's workers.
type Model struct {
	Name      string `json:"model"`
	BlockSize uint32 `json:"block_size"` // tokens
}

// NamespaceConfig configures JoinNamespace, which may create the namespace.
type NamespaceConfig struct {
	Name string // see [CheckNamespace]

	// Partitions is the number of the log's partitions, which never changes. Zero keeps the existing number, or means 8
	// in a new namespace.
	Partitions uint32

	// Replicas of the namespace's record: 1, 3 or 5, and the default for streams and buckets. Zero keeps the existing
	// number, or means 1 in a new namespace.
	Replicas int

	// Restore writes the namespace's record again if it is missing or unreadable. The number of partitions is then the
	// number of the log's streams. Without Restore, such a namespace is a [RecordError].
	Restore bool
}

// Namespace is a deployment's set of streams and buckets on a connection. Its methods may be called from any goroutine.
type Namespace struct {
	c          *Conn
	name       Names
	partitions uint32
	replicas   int
	meta       *Bucket
}

// JoinNamespace creates the namespace by compare-and-set if there is none. Indexers that start at once use the
// namespace of the first one. Only indexers call it.
//
// A namespace is new only if the log has no streams. If streams exist and the record is missing or unreadable, the
// error is a [RecordError]: a new record could have another number of partitions than the log.
//
// The server must accept messages with room for the largest value of a bucket, as by default. Otherwise the error wraps
// [ErrTooLarge], with both sizes and the setting. If the namespace has another number of partitions than the
// configuration, the error wraps [ErrMismatch] and has both numbers.
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
	meta, err := ensureBucket(ctx, c, Names(cfg.Name).MetaBucket(),
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
			// it exists; the answering server had not received the bucket yet
			ns, err = readNamespace(ctx, meta, cfg.Name)
		}
	}
	if err != nil {
		return nil, err
	}
	if cfg.Partitions != 0 && cfg.Partitions != ns.partitions {
		return nil, fmt.Errorf("%w: it was created with %d partitions, and %d are configured; the number cannot change",
			ErrMismatch, ns.partitions, cfg.Partitions)
	}
	there, err := c.streamInfo(ctx, meta.stream)
	if err != nil {
		return nil, err
	}
	ns.replicas = there.Config.Replicas
	return ns, nil
}

// OpenNamespace opens an existing namespace, for shims and clients. If there is none, the error wraps [ErrNoNamespace].
// If its record is unreadable, the error wraps [ErrBadRecord].
func OpenNamespace(ctx context.Context, c *Conn, name string) (*Namespace, error) {
	if err := CheckNamespace(name); err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	ns, err := readNamespace(ctx, openBucket(c, Names(name).MetaBucket()), name)
	if errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("%w: start an indexer first (%w)", ErrNoNamespace, err)
	} else if errors.Is(err, ErrBadRecord) {
		err = fmt.Errorf("%w; start an indexer with --restore-namespace to write it again", err)
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
	return &Namespace{c: meta.c, name: Names(name), partitions: rec.Partitions, replicas: 1, meta: meta}, nil
}

// Name returns the namespace's name.
func (n *Namespace) Name() string { return string(n.name) }

// Partitions returns the number of the log's partitions.
func (n *Namespace) Partitions() uint32 { return n.partitions }

// Conn returns the connection of the namespace.
func (n *Namespace) Conn() *Conn { return n.c }

// PartitionOf returns the partition of an instance in this namespace.
func (n *Namespace) PartitionOf(instance events.WorkerID) (events.Partition, error) {
	return PartitionOf(instance, n.partitions)
}

// WorkerKey returns the key of a rank in the bucket of workers.
func (n *Namespace) WorkerKey(key events.RankKey) (string, error) {
	p, err := n.PartitionOf(key.Instance)
	if err != nil {
		return "", err
	}
	return WorkerKey(p, key)
}

// RegisterModel registers the block size of a model. The first registration decides, until [Namespace.ForgetModel]. A
// different block size returns an error that wraps [ErrMismatch] and has both sizes.
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
	if errors.Is(err, errBadModel) { // the record is useless to all readers: write it again
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

// Model returns the registration of a model. It returns [ErrNotFound] if there is none.
func (n *Namespace) Model(ctx context.Context, name string) (Model, error) {
	key, err := modelKey(name)
	if err != nil {
		return Model{}, err
	}
	m, _, err := n.readModel(ctx, key)
	return m, err
}

// ForgetModel removes the registration of a model, so that the next worker decides again. The error is [ErrNotFound] if
// there is none. An unreadable record is removed too. The caller must check that no worker still serves the model. Two
// workers that register meanwhile, before and after the removal, may differ.
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

// announceForgotten writes a record for watchers of models, which do not receive an erased record.
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

// readModel reads the record of a model. It returns the record's revision also with an error that wraps errBadModel.
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

// errBadModel: the record of a model is unreadable. A shim of the model writes it again at its start.
var errBadModel = errors.New("the model's record cannot be read")

// parseModel decodes the record of a model under its key. The error wraps errBadModel.
func parseModel(key string, text []byte) (m Model, err error) {
	name, ok := parseModelKey(key)
	switch err := strictjson.Unmarshal(text, &m); {
	case err != nil:
		return Model{}, fmt.Errorf("%w: %w", errBadModel, err)
	case !ok || m.Name != name:
		return Model{}, fmt.Errorf("%w: it is of the model %.64q", errBadModel, m.Name)
	case m.BlockSize == 0 || m.BlockSize > events.MaxBlockSize:
		return Model{}, fmt.Errorf("%w: its block size is %d", errBadModel, m.BlockSize)
	}
	return m, nil
}
