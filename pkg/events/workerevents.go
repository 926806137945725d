package events

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// ReadWorkerEvents reads what one worker says of itself, without its name (ai-dynamo/dynamo › lib/kv-router,
// protocols): {"event_id":1,"data":{…},"dp_rank":0}, a KvCacheEvent, or {"events":[…],"shutdown":false}, KvCacheEvents;
// and a router event, whose worker_id does not count then. Without a worker it reads a router event that names one, as
// [ReadRouterEvent] does. yield is called with each event and its own JSON, in order;
// an error says that the rest cannot be read. shutdown says that the worker will say nothing more.
func ReadWorkerEvents(
	line []byte, worker WorkerID, yield func(e RouterEvent, text []byte) error,
) (shutdown bool, err error) {
	if worker == "" {
		e, err := ReadRouterEvent(line)
		if err == nil {
			err = yield(e, line)
		}
		return false, err
	}
	var form struct {
		Worker   json.RawMessage   `json:"worker_id"`
		Event    json.RawMessage   `json:"event"`
		Events   []json.RawMessage `json:"events"`
		Shutdown bool              `json:"shutdown"`
		ID       json.RawMessage   `json:"event_id"`
	}
	if err := strictjson.Unmarshal(line, &form); err != nil {
		return false, err
	}
	list := form.Events
	switch named, bare := form.Event != nil, form.ID != nil; {
	case named && !bare && list == nil:
		e, err := ReadRouterEvent(line)
		if err != nil {
			return false, err
		}
		e.Key.Instance = worker
		return false, yield(e, line)
	case bare && !named && list == nil:
		list = []json.RawMessage{line}
	case list == nil || bare || named:
		return false, errors.New("it has neither event_id and data, nor events, nor event, or several of them")
	}
	head := append(appendJSONString([]byte(`{"worker_id":`), string(worker)), `,"event":`...)
	for i, text := range list {
		framed := append(append(append([]byte(nil), head...), text...), '}')
		e, err := ReadRouterEvent(framed)
		if err == nil {
			e.Key.Instance = worker // as it is, UTF-8 or not
			err = yield(e, text)
		}
		if err != nil {
			return false, fmt.Errorf("event %d of %d: %w", i, len(list), err)
		}
	}
	return form.Shutdown, nil
}
