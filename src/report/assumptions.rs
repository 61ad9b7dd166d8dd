//! Names of the parts of a profile that a prediction assumes.

/// Parts of a profile, by their paths in its file.
const PARTS: &[(&str, &str)] = &[
    ("device", "peak rates and memory"),
    ("device.peak_flops_per_s.bf16", "peak rate in bf16"),
    ("device.compute_units", "number of compute units"),
    ("device.reserve", "memory reserve"),
    ("gemm", "GEMMs"),
    ("gemm.memory_efficiency", "memory-bound GEMMs"),
    ("gemm.exposed_epilogue", "epilogues of GEMMs"),
    ("gemm.tile_overhead_elements", "operand loads of GEMMs"),
    ("gemm.start_s", "starts of GEMMs"),
    ("gemm.relative_error", "the error of GEMMs"),
    ("gemm.error_growth", "the growth of errors of GEMMs"),
    ("attention", "attention kernels"),
    ("attention.start_s", "starts of attention"),
    ("attention.relative_error", "the error of attention"),
    ("passes", "fused ops"),
    ("passes.relative_error", "the error of fused ops"),
    ("links.intra_node", "intra-node links"),
    ("links.intra_node.fill_s", "start of collectives within a node"),
    ("links.intra_node.fill_half_bytes", "small messages within a node"),
    ("links.inter_node", "inter-node links"),
    ("links.inter_node.nics_per_node", "NICs per node"),
    ("links.inter_node.bandwidth_bytes_per_s", "inter-node bandwidth"),
    ("links.inter_node.extra_latency_s", "inter-node latency"),
    ("links.inter_node.relative_error", "the error of inter-node links"),
    ("links.relative_error", "the error of links"),
    ("overlap", "slowdown by overlap"),
    ("executors.captured", "launch gaps of captured graphs"),
    ("executors.compiled", "launches of fused ops"),
    ("executors.eager", "launch gaps of single kernels"),
];

/// Endings of the paths of errors.
const ERRORS: [&str; 2] = [".relative_error", ".step_error"];

/// A phrase for assumed parts of a profile, given as paths in its file. The error of an assumed part is implied, and not
/// listed.
pub fn phrase(paths: &[String]) -> String {
    let implied = |path: &&String| {
        let part = ERRORS.iter().find_map(|ending| path.strip_suffix(ending));
        part.is_some_and(|part| paths.iter().any(|path| path == part))
    };
    let names: Vec<&str> = paths.iter().filter(|path| !implied(path)).map(|p| name(p)).collect();
    names.join(", ")
}

/// The name of a part; its path for a part without a name.
fn name(path: &str) -> &str {
    match path {
        "executors.captured.step_error"
        | "executors.compiled.step_error"
        | "executors.eager.step_error" => "the error of steps",
        _ => PARTS.iter().find(|(known, _)| *known == path).map_or(path, |(_, name)| name),
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;

    use super::*;

    #[test]
    fn the_error_of_an_assumed_part_is_not_repeated() {
        let paths = ["attention", "attention.relative_error", "gemm.relative_error"];
        let paths = paths.map(str::to_owned);
        assert_eq!(phrase(&paths), "attention kernels, the error of GEMMs");
    }

    #[test]
    fn groups_and_assumed_parts_of_all_presets_have_names() {
        for preset in profile::preset_names() {
            let profile = profile::preset(preset).unwrap();
            let groups = profile.provenance().into_iter().map(|(group, _)| group.to_owned());
            for path in groups.chain(profile.assumed_paths()) {
                let is_record = ["measured", "measured.steps", "refits"].contains(&path.as_str());
                assert!(is_record || name(&path) != path, "{preset}: {path}");
            }
        }
    }
}
