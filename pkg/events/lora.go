package events

import (
	"math"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// LoRAByID is the name under which blocks of an adapter are hashed if the engine announces its number and not its name,
// as vLLM does before 0.14, and TensorRT-LLM. A query gives this name as lora_name. No adapter is called so.
func LoRAByID(id string) string { return loraByID + id }

const loraByID = "lora_id:"

func (d *Decoder) readLoRAID(r *msgp.Reader) {
	e := &d.raw
	if id, ok := r.Uint(math.MaxUint64); ok {
		// Maps name no adapter by nil. TensorRT-LLM's adapters are numbered from 0 on.
		if e.loraID = nil; id > 0 || e.isMap {
			e.loraID = strconv.AppendUint(d.digits[:0], id, 10)
		}
	} else if id, ok := r.Str(); ok {
		e.loraID = id
	} else if !r.Null() {
		e.badLoRAID = true
		r.Skip()
	}
}
