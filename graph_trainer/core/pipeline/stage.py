"""A stage of a pipeline: the two programs of its graph, and what it sends and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind, OutputKind, with_parts
from graph_trainer.core.graph.subclasses import with_stride, wrap
from graph_trainer.core.ordering.agreement import Agreement, OneRank
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.pipeline.reduce_once import reduce_once
from graph_trainer.core.pipeline.split_backward import split_backward
from graph_trainer.core.pipeline.stage_graphs import stage_graphs
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.guard import Guard
from graph_trainer.core.runtime.step import Gradients, output_tensor, run_compiled
from graph_trainer.core.torch_private_pipelining import StageBase

Parts = list[torch.Tensor]
"""The plain tensors that tensors consist of, in order."""


class GraphStage(StageBase):
    """One stage of a pipeline, whose forward and backward are the halves of a captured graph.

    What backward reads is kept from the forward of a microbatch to its backward. Sends and receives
    are of the plain tensors that the outputs consist of. A graph without backward is a stage of a
    pipeline that runs forward alone. With `splits_backward` the backward is two programs, for
    schedules that run them apart: see `split_backward`. With `reduces_once` the gradients of
    microbatches are added up before ranks reduce them: see `reduce_once`.

    Args:
        joint: of `capture_stage`, after its passes.
        module: the module that it was captured of.
        backend: the name of one of `backends.registry`.
        index, num_stages: the place of the stage.
        group: the ranks of the pipeline; None for the default group.
        data_group: the ranks that run this stage on other data, whose collectives are compared
            with this rank's, so that all of them make the stage together; None for no others.
        splits_backward: whether `backward_input` and `backward_weight` can be called.
        reduces_once: whether gradients that ranks reduce are of `reduce_grad` and not of backward.

    Raises:
        PassError: the graph cannot be cut.
        VerificationError: ranks of `data_group` issue other collectives.
    """

    def __init__(
        self,
        joint: JointGraph,
        module: nn.Module,
        backend: str = "eager",
        *,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        splits_backward: bool = False,
        reduces_once: bool = False,
    ) -> None:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        super().__init__(module, index, num_stages, device, group)
        self.joint = joint
        self._graphs = stage_graphs(joint) if joint.signature.backward else None
        self._forward_graph = joint if self._graphs is None else self._graphs.forward
        self._reduction = None
        self._split = None
        if self._graphs is not None:
            self._backward_graph = self._graphs.backward
            if reduces_once:
                self._reduction = reduce_once(self._backward_graph)
            if self._reduction is not None:
                self._backward_graph = self._reduction.backward
            if splits_backward:
                self._split = split_backward(self._backward_graph)
        self._compile(backend, OneRank() if data_group is None else Agreement(data_group))
        self._guard = Guard(joint)
        batch = joint.inputs_of(InputKind.BATCH)
        received = [(spec, nodes) for spec, nodes in batch if spec.name.startswith("args[")]
        self._received_specs = [spec for spec, _ in received]
        self._received_as = [value_of(node) for _, nodes in received for node in nodes]
        paths = joint.captured_call.batch.paths
        self._names = {path.partition("[")[0] for path in paths} - {"args"}
        gradients = joint.inputs_of(InputKind.OUTPUT_GRADIENT)
        self._gradients_as = [value_of(node) for _, nodes in gradients for node in nodes]
        self._unsharded: Parts = []
        self._sums: Parts = []
        # by microbatch
        self._received: dict[int, Parts] = {}
        self._inputs: dict[int, Parts] = {}
        self._saved: dict[int, Parts] = {}
        self._outputs: dict[int, Parts] = {}
        self._output_gradients: dict[int, Parts] = {}
        self._input_gradients: dict[int, Parts] = {}
        self._of_weights: dict[int, Parts] = {}

    @property
    def splits_backward(self) -> bool:
        """Whether `backward_input` and `backward_weight` can be called."""
        return self._split is not None

    def _compile(self, backend: str, agreement: Agreement | OneRank) -> None:
        graphs = [self._forward_graph]
        if self._graphs is not None:
            graphs.append(self._graphs.unshard)
            if self._split is None:
                graphs.append(self._backward_graph)
            else:
                graphs += [self._split.of_input, self._split.of_weights]
            if self._reduction is not None:
                graphs.append(self._reduction.reduce_grad)
        # all exchanges first: a rank that fails to compile then leaves none waiting in one of them
        for graph in graphs:
            check_order_across_ranks(graph, agreement)
        compile_graph = find_backend(backend).compile
        self._programs = {id(graph): compile_graph(graph) for graph in graphs}

    def _run(self, graph: JointGraph, values: Parts) -> Parts:
        return list(run_compiled(self._programs[id(graph)], graph, values))

    # --- what a step computes once ------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the parameters that forward keeps for backward, for all microbatches until
        `reshard`.

        Raises:
            CaptureError: the module differs from that of the capture.
        """
        if self._graphs is None or not self._graphs.unshard_reads:
            return
        tensors = self._guard.model.tensors(self.submod)
        inputs = self._forward_graph.signature.inputs[: len(tensors)]
        values = [
            part.detach()
            for spec, tensor in zip(inputs, tensors, strict=True)
            for part in spec.layout.parts_of(tensor)
        ]
        read = [values[place] for place in self._graphs.unshard_reads]
        self._unsharded = self._run(self._graphs.unshard, read)

    def reshard(self) -> None:
        """Free what `unshard` has gathered."""
        self._unsharded = []

    def reduce_grad(self) -> Gradients:
        """Return the gradients that ranks reduce, after the backward of all microbatches; empty
        where backward reduces them."""
        if self._reduction is None:
            return {}
        graph, sums, self._sums = self._reduction.reduce_grad, self._sums, []
        return self._gradients(None, graph, self._run(graph, sums))

    # --- what a microbatch computes ----------------------------------------------------------

    def forward(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Run the forward of a microbatch; return the loss of the last stage, None of others.

        Args:
            args: the batch of the first stage; other stages take what they have received.
            kwargs: of these a stage takes those that it was captured with.

        Raises:
            CaptureError: the module or the batch differ from those of the capture.
        """
        if not self.is_first:
            parts = _as(self._received_as, self._received.pop(microbatch))
            specs = with_parts(self._received_specs, parts)
            args = [wrap(parts_of_tensor, spec.layout) for spec, parts_of_tensor in specs]
        kwargs = {name: kwargs[name] for name in self._names}
        values = self._guard.values(self._guard.tensors(self.submod, args, kwargs))
        if self._graphs is not None:
            self._inputs[microbatch] = [values[place] for place in self._graphs.backward_reads]
            values += self._unsharded
        results = self._run(self._forward_graph, values)
        if self._graphs is not None:
            split = len(results) - self._graphs.saved_by.count(None)
            self._saved[microbatch] = results[split:]
            results = results[:split]
        if self.is_last:
            return results[0]
        self._outputs[microbatch] = results
        return None

    def backward(self, microbatch: int) -> Gradients:
        """Run the backward of a microbatch, and return the gradients of the parameters, but those
        of `reduce_grad`."""
        assert self._graphs is not None, "the stage was captured without backward"
        if self._split is not None:
            self.backward_input(microbatch)
            return self.backward_weight(microbatch)
        graph = self._backward_graph
        return self._gradients(microbatch, graph, self._run(graph, self._take(microbatch)))

    def backward_input(self, microbatch: int) -> None:
        """Compute the gradients of what a microbatch received, and keep what its
        `backward_weight` reads."""
        assert self._split is not None
        graph, values = self._split.of_input, self._take(microbatch)
        of_weights = [values[place] for place in self._split.reads]
        results = self._run(graph, values)
        gradients = [s for s in graph.signature.outputs if s.kind is OutputKind.INPUT_GRADIENT]
        split = sum(spec.layout.num_tensors for spec in gradients)
        self._gradients(microbatch, graph, results[:split])
        self._of_weights[microbatch] = of_weights + results[split:]

    def backward_weight(self, microbatch: int) -> Gradients:
        """Return the gradients of the parameters, but those of `reduce_grad`, after
        `backward_input`."""
        assert self._split is not None
        graph = self._split.of_weights
        results = self._run(graph, self._of_weights.pop(microbatch))
        return self._gradients(microbatch, graph, results)

    def _take(self, microbatch: int) -> Parts:
        """Return the inputs of backward, and forget them."""
        assert self._graphs is not None
        saved = iter(self._saved.pop(microbatch))
        values = self._inputs.pop(microbatch)
        for place in self._graphs.saved_by:
            values.append(next(saved) if place is None else self._unsharded[place])
        if self.is_last:
            loss = self.joint.signature.outputs[0].layout
            values.append(torch.ones(loss.shape, dtype=loss.dtype, device=self.device))
        else:
            values += _as(self._gradients_as, self._output_gradients.pop(microbatch))
        if self._reduction is not None and not self._sums:
            self._sums = self._reduction.zeros(self.device)
        return values + self._sums

    def _gradients(self, microbatch: int | None, graph: JointGraph, results: Parts) -> Gradients:
        """Return the gradients of parameters, and keep those of what a microbatch received."""
        gradients: Gradients = {}
        for spec, parts in with_parts(graph.signature.outputs, results):
            if spec.kind is OutputKind.GRADIENT:
                gradients[spec.name] = output_tensor(spec, parts)
            elif microbatch is not None and not self.is_first:
                self._input_gradients.setdefault(microbatch, []).extend(parts)
        return gradients

    # --- what it sends and receives, called by torch's runtime --------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive what the stage before sends."""
        self._received[fwd_chunk_id] = self._new_buffers(self._received_as)
        return self._operations(dist.irecv, self._received[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what forward returned."""
        return self._operations(dist.isend, self._outputs.pop(fwd_chunk_id), self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive the gradients of what forward returned."""
        self._output_gradients[bwd_chunk_id] = self._new_buffers(self._gradients_as)
        return self._operations(
            dist.irecv, self._output_gradients[bwd_chunk_id], self.stage_index + 1
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what was received."""
        return self._operations(
            dist.isend, self._input_gradients.pop(bwd_chunk_id), self.stage_index - 1
        )

    def pass_forward(self, microbatch: int, following: GraphStage) -> None:
        """Pass what forward returned to the next stage, which is on the same rank."""
        following._received[microbatch] = self._outputs.pop(microbatch)

    def pass_backward(self, microbatch: int, preceding: GraphStage) -> None:
        """Pass the gradients of what was received to the stage before, on the same rank."""
        preceding._output_gradients[microbatch] = self._input_gradients.pop(microbatch)

    def clear_runtime_states(self) -> None:
        """Forget the microbatches of a step that has failed."""
        for state in (self._received, self._inputs, self._saved, self._outputs):
            state.clear()
        self._output_gradients.clear()
        self._input_gradients.clear()
        self._of_weights.clear()
        self._unsharded.clear()
        self._sums.clear()

    def _operations(self, op: Any, tensors: Parts, stage: int) -> list[dist.P2POp]:
        peer = self._resolve_peer_global_rank(stage)
        return [dist.P2POp(op, tensor.contiguous(), peer, self.group) for tensor in tensors]

    def _new_buffers(self, like: Sequence[torch.Tensor]) -> Parts:
        return [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in like]

    # in a V, stages that follow each other are on one rank
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [one for one in operations if one.group_peer != self.group_rank]

    # the graph has the shapes, and nothing is exchanged to find them
    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return ()


def _as(like: Sequence[torch.Tensor], parts: Parts) -> Parts:
    """Give what was received, which is contiguous, the strides of the capture."""
    return [with_stride(part, t.stride()) for t, part in zip(like, parts, strict=True)]
